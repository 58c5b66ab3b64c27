"""The last module that the server of the pools imports: its ranks then share the pages of what is imported."""

import gc

gc.collect()
gc.freeze()  # a collection writes to every object that it visits, so each rank would copy all pages
gc.set_threshold(20_000, 20, 20)  # collections cost 4 % of all tests with the default of 700 objects
