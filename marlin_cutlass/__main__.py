"""`python -m marlin_cutlass`: the command line."""

from .cli import app

if __name__ == "__main__":
    app(prog_name="python -m marlin_cutlass")
