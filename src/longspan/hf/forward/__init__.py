"""The forward of a parallelized model: its stages, attention, recurrent layers, losses and outputs."""
