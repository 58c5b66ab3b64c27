"""Fixtures and settings that every test shares."""

from __future__ import annotations

import functools
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.pool import RankPool

# Before anything imports a Hugging Face library, and inherited by the ranks: no test may depend on the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# No deadline (a collective's time depends on the machine), and the same examples in every run; with `make fuzz` others.
_ANYWHERE = settings(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.register_profile("ci", _ANYWHERE, derandomize=True)
settings.register_profile("fuzz", _ANYWHERE, print_blob=True)
settings.load_profile("ci")


COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""All tests of the files that pytest was given, also those that `-m` and `-k` leave out, but not what only confirms."""


MARKS_OF_FILES = ("fast", "ranks", "rounding", "versions")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", default="1/1", help="2/3: every third file with the mark of -m, by size, from the second on"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file that has no test with the mark that `-m` begins with: its imports may take seconds."""
    mark = config.option.markexpr.partition(" ")[0]
    if mark not in MARKS_OF_FILES or not collection_path.match("test_*.py"):
        return None
    part, parts = map(int, config.option.part.split("/"))
    return None if collection_path in _files_with(mark)[part - 1 :: parts] else True


@functools.cache
def _files_with(mark: str) -> list[Path]:
    found = [path for path in sorted(Path(__file__).parent.rglob("test_*.py")) if names_mark(path, mark)]
    return sorted(found, key=lambda path: path.stat().st_size, reverse=True)  # so that parts take about as long


def names_mark(path: Path, mark: str) -> bool:
    """Return whether a file may have tests with a mark of `MARKS_OF_FILES`."""
    named = r"pool|launcher" if mark == "ranks" else rf"mark\.{mark}\b"
    return re.search(named, path.read_text()) is not None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Add the mark that follows from others: `ranks`."""
    if "get_pool" in getattr(item, "fixturenames", ()) or item.get_closest_marker("launcher"):
        item.add_marker("ranks")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `confirms`, unless `-m` names that mark."""
    config.stash[COLLECTED] = [item for item in items if not item.get_closest_marker("confirms")]
    if "confirms" in config.option.markexpr:
        return
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("confirms")])
    items[:] = config.stash[COLLECTED]


@pytest.fixture(scope="session")
def get_pool() -> Iterator[Callable[[int], RankPool]]:
    """`get_pool(n)`: the session's pool of `n` ranks. Its processes start with its first task."""
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest, get_pool: Callable[[int], RankPool]) -> RankPool:
    """A pool of as many ranks as the test asks for: `@pytest.mark.parametrize("pool", [2, 4], indirect=True)`."""
    return get_pool(request.param)


@pytest.fixture(scope="session")
def pool2(get_pool: Callable[[int], RankPool]) -> RankPool:
    return get_pool(2)


@pytest.fixture(scope="session")
def pool4(get_pool: Callable[[int], RankPool]) -> RankPool:
    return get_pool(4)


@pytest.fixture(scope="session")
def pool8(get_pool: Callable[[int], RankPool]) -> RankPool:
    return get_pool(8)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium under selenium's WebDriver."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="no page is opened: pip install selenium")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no page is opened: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # Both programs by their paths, or selenium would look for them in the network.
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


@pytest.fixture
def store() -> Iterator[Any]:
    """A store as the first rank of a job holds it."""
    import torch.distributed as dist

    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    yield dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with its tokenizer, chats, preferences and texts, for `longspan train`."""
    from tests.train.training import make_toy

    return make_toy(tmp_path_factory.mktemp("toy"))
