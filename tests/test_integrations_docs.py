"""docs/integrations.md and the examples: files, flags and names exist, and the script runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "docs" / "integrations.md", ROOT / "examples" / "serve_vllm.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_the_pages_name_exist(page):
    text = page.read_text()
    names = set(re.findall(r"(?:benchmarks|examples|tests|docs)/[\w/]+\.(?:py|md)", text))
    assert names
    for name in names:
        assert (ROOT / name).is_file(), name


def test_options_of_the_benchmarks_in_the_page_exist():
    text = PAGES[0].read_text()
    for script in ("llm", "llm_load"):
        source = (ROOT / "benchmarks" / f"{script}.py").read_text()
        options = re.findall(rf"benchmarks/{script}\.py (--[^#\n]*)", text)
        assert options
        for option in re.findall(r"--([\w-]+)", " ".join(options)):
            assert re.search(rf"\b{option.replace('-', '_')}: Annotated", source), option


def test_the_switch_and_the_class_of_the_page_are_those_of_the_plugin():
    from marlin_cutlass.integrations.vllm import ENVIRONMENT

    text = PAGES[0].read_text()
    assert ENVIRONMENT in text and "McW4A16LinearKernel" in text
    source = (ROOT / "marlin_cutlass/integrations/vllm_kernel.py").read_text()
    assert "class McW4A16LinearKernel" in source
    assert not {"marlin", "humming"} & set(re.findall("marlin|humming", "mcw4a16linearkernel"))


def test_the_entry_point_names_the_plugin():
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]' in text
    assert 'marlin_cutlass = "marlin_cutlass.integrations.vllm:register"' in text


def test_importing_the_plugin_imports_no_engine():
    code = "import sys, marlin_cutlass.integrations.vllm; sys.exit('vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.slow
def test_the_tensor_parallel_example_generates(tmp_path):
    pytest.importorskip("transformers", minversion="5.16")
    tokenizers = pytest.importorskip("tokenizers")
    from integration_models import write_folder
    from transformers import PreTrainedTokenizerFast

    write_folder(tmp_path / "a", "llama", "gptq")
    words = {word: i for i, word in enumerate(["<unk>", *(f"w{i}" for i in range(95))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "a")
    script = ROOT / "examples" / "serve_tensor_parallel.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", str(script), str(tmp_path / "a"), "w5 w6 w7", "--tokens", "4"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "w5 w6 w7" in run.stdout and "tokens/s on 2 x cpu" in run.stdout
