"""The ops in C++ for CPUs: sources, their build, and the loaded library."""
