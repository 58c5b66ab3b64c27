"""The last module that the server of the pools imports: its ranks then share the pages of what is imported."""

import gc

gc.collect()
gc.freeze()  # a collection writes to every object that it visits, so each rank would copy all pages
