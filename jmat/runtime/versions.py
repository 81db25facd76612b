"""Names the versions of packages that figures depend on."""

import importlib.metadata


def package_version(package: str) -> str:
    """Returns the version of an installed package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
