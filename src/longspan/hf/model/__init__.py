"""What a model is: its name and files, what it reads, its layers and encoders, and whether it is accepted."""
