"""The command line, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import marlin_cutlass
from marlin_cutlass.cli import app
from tests.test_checkpoint import GPTQ, folder, gptq_tensors

runner = CliRunner()


def run(*args) -> tuple[int, str, str]:
    result = runner.invoke(app, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def source(tmp_path):
    return folder(tmp_path / "in", gptq_tensors(), GPTQ)


def test_convert_inspect_verify(source, tmp_path):
    target = tmp_path / "out"
    code, stdout, _ = run("convert", source, target, "--json", "-q")
    assert code == 0
    assert sorted(json.loads(stdout)["layers"])[0] == "model.layers.0.q_proj"
    code, stdout, _ = run("inspect", target, "--json")
    found = json.loads(stdout)
    assert found["format"] == "marlin_cutlass" and found["other_tensors"] == 3
    assert [(x["k"], x["n"]) for x in found["layers"]] == [(256, 128)] * 2
    code, stdout, _ = run("verify", source, target, "--json", "-q")
    assert code == 0 and json.loads(stdout)["worst"] < 1e-6


def test_inspect_names_a_kernel_or_the_reason_for_each_layer(source):
    code, stdout, _ = run("inspect", source, "--gpu", "RTX 3090", "--m", 1, "--m", 64, "--json")
    assert code == 0
    for layer in json.loads(stdout)["layers"]:
        assert set(layer["kernels"]) == {"1", "64"}
        assert all(
            "sm_86" in text or text.startswith("w4a16") for text in layer["kernels"].values()
        )
    code, _, stderr = run("inspect", source, "--gpu", "Voodoo2")
    assert code == 2 and "Voodoo2" in stderr and "H200" in stderr


def test_verify_fails_with_exit_code_1(source, tmp_path):
    run("convert", source, tmp_path / "out", "-q")
    tensors = gptq_tensors()
    tensors["model.layers.0.q_proj.scales"][0, 0] *= 3
    changed = folder(tmp_path / "changed", tensors, GPTQ)
    code, stdout, _ = run("verify", changed, tmp_path / "out", "-q")
    assert code == 1 and "model.layers.0.q_proj: " in stdout and "FAILED" in stdout
    assert "model.layers.1.q_proj: " not in stdout
    tensors = gptq_tensors()
    tensors["model.embed_tokens.weight"] += 1
    changed = folder(tmp_path / "copied", tensors, GPTQ)
    code, _, stderr = run("verify", changed, tmp_path / "out", "-q")
    assert code == 2 and "model.embed_tokens.weight differs" in stderr


def test_user_errors_have_no_traceback(tmp_path, source):
    for args in (
        ("convert", tmp_path / "absent", tmp_path / "x"),
        ("quantize", source, tmp_path / "x", "--method", "gptq"),
        ("quantize", source, tmp_path / "x", "--resume", tmp_path / "r"),
        ("quantize", source, tmp_path / "x", "--sensitivity"),
        ("inspect", source / "tokenizer.json"),
        ("quantize", source, tmp_path / "x", "--clip", "maybe"),
    ):
        code, _, stderr = run(*args)
        assert code == 2 and "error:" in stderr and "Traceback" not in stderr, (args, stderr)
    assert not (tmp_path / "x").exists()


def test_dense_folder_needs_quantize(tmp_path):
    src = folder(tmp_path / "in", {"a.q_proj.weight": torch.randn(64, 256).half()}, None)
    code, _, stderr = run("convert", src, tmp_path / "x")
    assert code == 2 and "marlin-cutlass quantize" in stderr
    code, stdout, _ = run("quantize", src, tmp_path / "x", "-g", 64, "--asymmetric", "-q")
    assert code == 0 and "1 layers packed" in stdout
    code, stdout, _ = run("verify", src, tmp_path / "x", "-q", "--json")
    assert code == 0 and 0.01 < json.loads(stdout)["worst"] < 0.5
    code, stdout, _ = run("inspect", tmp_path / "x")
    assert code == 0 and "a.q_proj" in stdout


def test_gptq_folder_with_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=32,
        architectures=["BertModel"],
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config)
    model.save_pretrained(tmp_path / "in")
    words = {w: i for i, w in enumerate(["[PAD]", "[UNK]", *"abcdefghijklmnopqrst"])}
    tok = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tok, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(tmp_path / "in")
    texts = tmp_path / "calibration.txt"
    texts.write_text("a b c d e f\ng h i\nj k l m n o p q r s t\n")
    code, stdout, stderr = run(
        "quantize",
        tmp_path / "in",
        tmp_path / "out",
        "--method",
        "gptq",
        "-g",
        32,
        "--calibration",
        texts,
        "--sensitivity",
        "--refine",
        2,
        "-q",
        "--json",
    )
    assert code == 0, stderr
    assert len(json.loads(stdout)["layers"]) == 13
    made = ("quantize", tmp_path / "in", tmp_path / "made", "--method", "gptq", "-g", 32)
    code, _, stderr = run(*made, "--calibration", "vocabulary", "-q")
    assert code == 2 and "no whole words" in stderr  # letters are none
    code, _, stderr = run(*made, "--calibration", tmp_path / "absent.txt", "-q")
    assert code == 2 and "absent.txt" in stderr
    from marlin_cutlass.files import load_model
    from marlin_cutlass.quantize.folder import load_transformers

    empty, _ = load_transformers(tmp_path / "in", empty=True)
    loaded = load_model(empty, tmp_path / "out").eval()
    ids = torch.tensor([[2, 3, 4, 5]])
    with torch.no_grad():
        a = model.eval()(input_ids=ids).last_hidden_state
        b = loaded(input_ids=ids).last_hidden_state
    assert float((a - b).norm() / a.norm()) < 0.05


@pytest.mark.parametrize("command", ["quantize", "convert", "inspect", "verify", "info"])
def test_help_has_an_example(command):
    code, stdout, _ = run(command, "--help")
    assert code == 0 and "Example" in stdout


@pytest.mark.parametrize("command", ["bench", "explore", "tune", "profile", "build"])
def test_help_of_other_parts_lists_their_options(command):
    """In a process of its own: cutlass_library would answer --help when it is imported."""
    line = [sys.executable, "-m", "marlin_cutlass", command, "--help"]
    result = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert ("--arch" if command == "build" else "--group-size") in result.stdout


def test_bench_names_a_bad_size_before_it_asks_for_a_gpu():
    for options, reason in ((["--n", 0], "n=0"), (["--k", 100], "k=100 is not a multiple")):
        code, _, stderr = run("bench", *options)
        assert code == 2 and reason in stderr


def test_version():
    code, stdout, _ = run("--version")
    assert code == 0 and stdout.strip() == marlin_cutlass.__version__


def test_module_entry_point():
    command = [sys.executable, "-m", "marlin_cutlass", "info", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["layout_version"] == 1


def test_commands_of_absent_parts_say_so(monkeypatch):
    import marlin_cutlass.cli as cli

    monkeypatch.setattr(
        cli.importlib,
        "import_module",
        lambda name: (_ for _ in ()).throw(ModuleNotFoundError(name)),
    )
    code, _, stderr = run("explore", "--anything")
    assert code == 2 and "'explore' is not available" in stderr
