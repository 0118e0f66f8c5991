// Storage types that the kernels serve.
#pragma once

namespace pagegraph {

// In the order of tables of kernels.
enum Element { FLOAT32, BFLOAT16, FLOAT16 };

}  // namespace pagegraph
