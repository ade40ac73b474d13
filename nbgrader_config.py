"""nbgrader's settings; run nbgrader in this folder.

    nbgrader generate_assignment --force 01_collectives    before autograding, whenever a source changed
    nbgrader autograde 01_collectives                      submitted/STUDENT/01_collectives/*.ipynb and *.py
    nbgrader generate_feedback 01_collectives
    nbgrader export

The cells of a submitted worksheet run in the process of the call that grades them, so a student can forge
a score here. `autograder grade` takes only the .py files and has no such gap.
"""

from pathlib import Path

from nbgrader.converters import GenerateAssignment

from autograder.grading.release import ClearSolutionFiles, modules, student_files

c = get_config()  # noqa: F821
root = Path(__file__).resolve().parent

c.CourseDirectory.source_directory = "solutions"
c.CourseDirectory.release_directory = "assignments"
# These reach neither assignments/ nor the folder in which a submission is graded.
c.CourseDirectory.ignore = [
    "hidden_checks.py",
    "*.md",  # the sources of the worksheets, with the answers
    "__pycache__",
    "*.pyc",
    ".*",
    "*~",
    "*.bak",
    "*.orig",
]

c.GenerateAssignment.preprocessors = [ClearSolutionFiles, *GenerateAssignment.preprocessors.default()]
c.ClearSolutions.code_stub = {"python": 'raise NotImplementedError("not implemented yet")'}

# autograde copies the source's files over the submitted ones, solutions too, except for these.
c.Autograde.exclude_overwriting = {module: student_files(root / "solutions" / module) for module in modules(root)}

c.Execute.timeout = 600  # seconds for one cell
# nbgrader gives 0 to a cell that writes to stderr before its number; a warning must not cost points.
c.IgnorePattern.enabled = True
c.IgnorePattern.pattern = "(?s)."
