"""Stands before pandas in the child processes of the tests.

With the first array that it makes, pyarrow imports pandas if it is there: a third of a short job's time, for nothing
that these jobs need.
"""

raise ImportError("the tests' child processes do without pandas")
