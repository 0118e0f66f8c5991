"""What a process imports before it serves: seconds that an engine loaded from an artifact must not spend."""

import subprocess
import sys

HEAVY = """
import sys
import runtime.artifact
import runtime.engine
names = ("torch._dynamo", "torch._inductor", "transformers", "sympy", "triton")
print([name for name in names if name in sys.modules])
"""


def test_the_engine_imports_neither_compiler_nor_transformers():
    done = subprocess.run([sys.executable, "-c", HEAVY], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
