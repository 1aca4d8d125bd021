"""A detector, reports of few and of many films, and a browser to open them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from afire.detect.base import AnomalyDetector
from afire.detect.findings import Rule, rule_of
from tests.browser import Browser
from tests.detect.conftest import detector, model
from tests.detect_page_parts import fresh, write_few, write_many
from tests.tasks.conftest import films, packed

__all__ = ["detector", "films", "model", "packed"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def rule(detector: AnomalyDetector) -> Rule:
    return rule_of(detector)


@pytest.fixture(scope="session")
def few(detector: AnomalyDetector, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_few(tmp_path_factory.mktemp("few"), detector)


@pytest.fixture(scope="session")
def many(detector: AnomalyDetector, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_many(tmp_path_factory.mktemp("many"), detector)


@pytest.fixture
def opened(browser: Browser, few: Path) -> Browser:
    """The page of few films in the browser, as it is the first time."""
    return fresh(browser, few)
