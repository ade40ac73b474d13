"""A course of one module, small enough to be released and graded by nbgrader in a test."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from nbgrader.api import Gradebook

from autograder.grading import notebooks

MODULE = "01_tiny"
ROOT = Path(__file__).resolve().parents[1]

TINY = '''"""Two problems."""


def double(x: float) -> float:
    """Twice x."""
    ### BEGIN SOLUTION
    return x + x
    ### END SOLUTION


def square(x: float) -> float:
    """x times x."""
    if x == 0:
        ### BEGIN SOLUTION
        return 0
        ### END SOLUTION
    ### BEGIN SOLUTION
    return x**2
    ### END SOLUTION
'''

# Stands in for autograder.grade. It writes to stderr first, as a library's warning would.
GIVEN = '''"""Given code: the grader of this module."""

import sys


def score(problem: str, points: int) -> float:
    """The points that the file beside this one earns for a problem."""
    import tiny

    print("a warning", file=sys.stderr)
    expected = {"double": [0, 6], "square": [0, 9]}[problem]
    try:
        found = [getattr(tiny, problem)(x) for x in (0, 3)]
    except NotImplementedError as error:
        print(error)
        return 0.0
    return float(points) if found == expected else 0.0
'''

WORKSHEET = """# A worksheet

Twice, and squared.

```python
import given
```

```python tags=["try-it"]
import tiny

tiny.__doc__
```

```python nbgrader={"grade": true, "grade_id": "double", "locked": true, "points": 10, "schema_version": 3, "solution": false, "task": false}
given.score("double", points=10)
```

```python nbgrader={"grade": true, "grade_id": "square", "locked": true, "points": 20, "schema_version": 3, "solution": false, "task": false}
given.score("square", points=20)
```

<!-- #region nbgrader={"grade": true, "grade_id": "why", "locked": false, "points": 5, "schema_version": 3, "solution": true, "task": false} -->
Why is the square of 2 its double?

### BEGIN SOLUTION
Because x² = 2x for x = 2.


The model answer has two paragraphs.
### END SOLUTION
<!-- #endregion -->
"""  # noqa: E501


def make(root: Path) -> Path:
    """Write the course to a folder, with the settings of the real one; returns its module's source folder."""
    folder = root / "solutions" / MODULE
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "nbgrader_config.py", root)
    (folder / "tiny.py").write_text(TINY)
    (folder / "given.py").write_text(GIVEN)
    (folder / "hidden_checks.py").write_text("SECRET = 1\n")
    (folder / "tiny.md").write_text(WORKSHEET)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "tiny.cpython-311.pyc").write_bytes(b"SECRET")
    (folder / ".tiny.py.swp").write_text("SECRET")
    notebooks.build(folder / "tiny.md")
    return folder


# Several commands in one process: nbgrader takes five seconds to import.
RUN_COMMANDS = """
import json, sys
from nbgrader.apps import NbGraderApp
from traitlets.config import Application
for arguments in json.loads(sys.argv[1]):
    NbGraderApp.launch_instance(arguments)
    type(Application.instance()).clear_instance()
"""


def nbgrader(root: Path, *commands: str) -> str:
    """Run nbgrader's commands in a course, each of which must succeed; returns what they printed."""
    arguments = json.dumps([command.split() for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", RUN_COMMANDS, arguments],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def scores(root: Path, module: str) -> dict[str, dict[str, float]]:
    """What nbgrader's gradebook holds: the score of each graded cell of each student."""
    with Gradebook(f"sqlite:///{root}/gradebook.db") as gradebook:
        return {
            submission.student.id: {
                grade.name: grade.score for notebook in submission.notebooks for grade in notebook.grades
            }
            for submission in gradebook.assignment_submissions(module)
        }
