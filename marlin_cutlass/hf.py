"""`marlin_cutlass.hf.from_pretrained(folder)`: INT4 checkpoints in Transformers.

Importing this module also registers the format: `AutoModelForCausalLM.from_pretrained` then reads
converted folders.
"""

from .integrations.transformers import MarlinCutlassConfig, from_pretrained, register

__all__ = ["MarlinCutlassConfig", "from_pretrained", "register"]

register()
