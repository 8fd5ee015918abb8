"""Builds the package: setuptools, beside copies of the scripts and of the licences.

Those belong to all languages, two folders above this one. A source distribution has the copies.
"""

import contextlib
import shutil
from pathlib import Path

from setuptools import build_meta

HERE = Path(__file__).resolve().parent
COPIES = HERE / "redlatch" / "lua"
SCRIPTS = ("mutex", "reentrant", "rwlock", "node", "fenced")


@contextlib.contextmanager
def copies():
    """Nothing of another folder may get into the package: only in a checkout, these are copied."""
    lua = HERE.parents[1]
    is_checkout = lua / "clients" / "python" == HERE and (lua / "SHA1SUMS").exists()
    try:
        if is_checkout:
            COPIES.mkdir(exist_ok=True)
            for file in [*(f"{kind}.lua" for kind in SCRIPTS), "LICENSE-APACHE", "LICENSE-MIT"]:
                shutil.copyfile(lua / file, COPIES / file)
        missing = [kind for kind in SCRIPTS if not (COPIES / f"{kind}.lua").exists()]
        if missing:
            raise FileNotFoundError(f"{COPIES} has no script {', '.join(missing)}")
        yield
    finally:
        if is_checkout:
            shutil.rmtree(COPIES)


def with_copies(hook):
    def build(*arguments, **options):
        with copies():
            return hook(*arguments, **options)

    return build


prepare_metadata_for_build_wheel = with_copies(build_meta.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = with_copies(build_meta.prepare_metadata_for_build_editable)
build_wheel = with_copies(build_meta.build_wheel)
build_editable = with_copies(build_meta.build_editable)
build_sdist = with_copies(build_meta.build_sdist)
