"""One progress bar for everything that takes a while: on stderr, so that stdout stays data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(show: bool, total: int, title: str) -> Iterator[Callable[[str], None]]:
    """Gives tick(name), which advances the bar by one; does nothing unless `show`."""
    if not show:
        yield lambda _name: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda name: progress.update(task, advance=1, description=name[-40:])
