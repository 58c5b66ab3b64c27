"""What longspan uses of torch and transformers that is private, or that only some of their versions have; nothing else.

Everything here says for which versions it is (those that the tests run with), what the public way would be, and what is
done when the name is gone: the public way, or a `LongspanError` that says which versions have it. No other module uses
a private name of the two.
"""
