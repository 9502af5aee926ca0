"""Tasks: what a job computes for a row. Standard library only.

`TASKS` is the table of all tasks by name. A new task is a module here, a line in the table, and the entries of its
columns in the store.
"""

from batchjob.tasks.base import Detokenizer, Task, TaskConfig
from batchjob.tasks.generate import Generate

TASKS: dict[str, type[Task]] = {task.name: task for task in (Generate,)}

__all__ = ["TASKS", "Detokenizer", "Generate", "Task", "TaskConfig"]
