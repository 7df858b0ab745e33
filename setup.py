"""Leaves programs of the project's developers out of wheels. Everything else is declared in pyproject.toml."""

from setuptools import setup
from setuptools.command.build_py import build_py

# They compare commits, or rewrite pages and tests of a clone.
OF_A_CLONE = {"capture_configurations", "docs_site", "same_answers", "same_losses", "seeded_faults"}
OF_A_CLONE |= {f"write_{page}" for page in ("capture_table", "flag_docs", "plan_checks")}


class BuildPy(build_py):
    """Finds the modules of a wheel."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Returns (package, module, file) of each module to install."""
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if package != "megatron.tools" or module[1] not in OF_A_CLONE]


setup(cmdclass={"build_py": BuildPy})
