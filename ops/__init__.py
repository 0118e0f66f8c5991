"""The ops that graphs call: paged attention, KV-cache writes and copies, sampling.

Importing this package defines them in `torch.ops.pagegraph`, with every provider that it ships. `select` picks one
provider of an op for a device; its `overload` is what a graph calls.
"""

from ops.cpu.library import register_cpu_providers
from ops.providers import Choice, Provider, register, select
from ops.schema import SCHEMAS, schema_hash
from ops.triton.library import register_triton_providers
from ops.varlen import register_varlen_provider

__all__ = ["SCHEMAS", "Choice", "Provider", "register", "schema_hash", "select"]

register_cpu_providers()
register_triton_providers()
register_varlen_provider()
