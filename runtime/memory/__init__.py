"""Paged KV-cache memory: physical blocks, the prefix cache, and each request's block table. Imports no torch."""
