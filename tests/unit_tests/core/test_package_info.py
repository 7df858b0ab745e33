"""`megatron.core.package_info` states a release of Megatron Core, which plug-ins compare, and our own metadata."""

import re
import tomllib

import pytest
from packaging.version import Version

import megatron
import megatron.core
from megatron.core import package_info
from tests.harness import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_a_plug_in_compares_the_version_of_megatron_core() -> None:
    assert megatron.core.__version__ == package_info.__version__
    # As plug-ins do: by packaging, and as text.
    assert Version(megatron.core.__version__) >= Version("0.12.0") and megatron.core.__version__ >= "0.12"
    assert Version(megatron.core.__version__).release == package_info.VERSION[:3]
    assert megatron.core.__version__ != megatron.__version__


def test_the_parts_of_the_version_agree() -> None:
    *numbers, suffix = package_info.VERSION
    assert numbers == [package_info.MAJOR, package_info.MINOR, package_info.PATCH]
    assert suffix == package_info.PRE_RELEASE
    assert package_info.__shortversion__ == ".".join(map(str, numbers))
    assert package_info.__version__ == package_info.__shortversion__ + suffix


def test_the_version_is_the_release_that_exchanged_checkpoints() -> None:
    recipe = (ROOT / "tests" / "megatron_core" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"megatron-core==(\S+)", recipe) == [package_info.__version__]
    assert f" {package_info.__version__}," in (ROOT / "docs" / "python_names.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("__package_name__", PROJECT["name"]),
        ("__description__", PROJECT["description"]),
        ("__license__", PROJECT["license"]),
        ("__keywords__", ", ".join(PROJECT["keywords"])),
        ("__homepage__", PROJECT["urls"]["Documentation"]),
        ("__repository_url__", PROJECT["urls"]["Source"]),
        ("__download_url__", PROJECT["urls"]["Source"]),
    ],
)
def test_the_metadata_is_that_of_the_project(name: str, value: str) -> None:
    assert vars(package_info)[name] == value


def test_the_contacts_are_text() -> None:
    assert package_info.__contact_names__ in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert isinstance(package_info.__contact_emails__, str)
