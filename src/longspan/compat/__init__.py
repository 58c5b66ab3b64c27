"""Every private or version-bound name of torch, transformers and their friends that longspan uses; nothing else.

A version without such a name raises Python's own error where it is used. A docstring says why no public name does it.
"""
