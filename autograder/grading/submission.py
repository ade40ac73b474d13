"""A submission: the files that are taken from a student's folder, copied to a place of their own.

Only the files that a module lists are taken. A `torch.py` or `conftest.py` lying beside them is never seen.
"""

import difflib
import shutil
import stat
import tempfile
from pathlib import Path

from autograder.grading import catalog
from autograder.lab.findings import Finding
from autograder.suites.kit import Module

MAX_FILE = 2**20  # bytes


class Submission:
    """One student's folder, which holds module folders (or is one).

    Args:
        folder: where the student's work is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._staged = Path(tempfile.mkdtemp(prefix="submission-"))

    def close(self) -> None:
        shutil.rmtree(self._staged, ignore_errors=True)

    def stage(self, module: Module) -> Path:
        """Copy this module's files, and those of earlier modules that they may import, and return the main file.

        An earlier module's file is the student's own; where only this module was handed in, the reference stands in.

        Raises:
            Finding: a file of this module is missing or is not an ordinary small file.
        """
        for name in module.files:
            source = self._find(module, name)
            problem = self._unusable(source)
            if problem:
                raise Finding("failed", f"{module.name}/{name} {problem}", self._nearby(source))
            self._copy(source, module)
        earlier = catalog.modules()[: catalog.modules().index(module)] if module in catalog.modules() else ()
        for other in earlier:
            for name in other.files:
                places = [self._find(other, name), self.folder / ".." / other.name / name]
                places.append(catalog.SOLUTIONS / other.name / name)
                usable = [place for place in places if not self._unusable(place)]
                if usable:
                    self._copy(usable[0], other)
        return self._staged / module.name / module.files[0]

    def _copy(self, source: Path, module: Module) -> None:
        target = self._staged / module.name / source.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)

    def path(self, module: Module) -> Path:
        """Where the student edits the module's main file."""
        return self._find(module, module.files[0])

    def _find(self, module: Module, name: str) -> Path:
        direct = self.folder / name
        inside = self.folder / module.name / name
        return direct if direct.exists() and not inside.exists() else inside

    def _unusable(self, path: Path) -> str | None:
        try:
            info = path.lstat()
        except OSError:
            return "is missing"
        if stat.S_ISDIR(info.st_mode):
            return "is a folder, not a file"
        if stat.S_ISLNK(info.st_mode):
            return "is a link: put the file itself there"
        if not stat.S_ISREG(info.st_mode):
            return "is not an ordinary file"
        if info.st_size == 0:
            return "is empty"
        if info.st_size > MAX_FILE:
            return f"is larger than {MAX_FILE // 2**20} MiB"
        return None

    def _nearby(self, path: Path) -> list[tuple[str, str]]:
        """Where a file was looked for, what is there instead, and which of that is meant."""
        if path.exists() or path.is_symlink():
            return [("found", str(path))]
        folder = path.parent if path.parent.is_dir() else self.folder
        if not folder.is_dir():
            return [("expected", str(path)), ("found", f"there is no folder {folder}")]
        names = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
        shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        facts = [("expected", str(path)), ("found", f"in {folder}: {shown or 'nothing'}")]
        near = difflib.get_close_matches(path.relative_to(folder).parts[0], names, n=1)
        if near:
            facts.append(("perhaps", f"rename {near[0]} to {path.relative_to(folder).parts[0]}"))
        elif folder == self.folder and folder != path.parent:
            facts.append(("perhaps", f"--submission is to be the folder in which {path.parent.name}/ is"))
        return facts
