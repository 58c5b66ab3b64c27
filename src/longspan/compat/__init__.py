"""Every private or version-bound name of torch, transformers and their friends that longspan uses; nothing else.

"When gone" in a docstring is what happens if a version lacks the name: a fallback, or a `LongspanError` that names
versions that have it. "Versions" are those that have it, by default all that longspan supports. "Public way" is the
public API for the same, by default none.
"""
