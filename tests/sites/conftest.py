"""Fixtures: folders of images and an agreement."""

from pathlib import Path

import pytest

from fczoo.sites.federation_config import write_agreement
from helpers_site_folders import SETTINGS, TASKS, write_images
from helpers_sites import NAMES


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the images of the sites; see ``write_images``."""
    root = tmp_path_factory.mktemp("images")
    write_images(root)
    return root


@pytest.fixture
def agreement_folder(tmp_path: Path) -> Path:
    """Write an agreement and return its folder."""
    write_agreement(tmp_path / "agreed", "hgp", NAMES, TASKS, SETTINGS)
    return tmp_path / "agreed"
