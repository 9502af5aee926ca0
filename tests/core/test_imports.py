"""The core runs where nothing but Python is installed."""

import subprocess
import sys

SCRIPT = """
import sys
for name in ("torch", "numpy", "transformers", "pyarrow", "click", "batchjob_kernels"):
    sys.modules[name] = None  # an import of it raises ImportError
before = set(sys.modules)
import batchjob.core
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(loaded - sys.stdlib_module_names - {"batchjob"}))
"""


def test_the_core_imports_the_standard_library_alone(project_root):
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=project_root, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout == "[]\n"
