"""`python -m benchmarks.gpu`; see `report.py`, whose functions other processes import."""

from benchmarks.gpu.report import main

if __name__ == "__main__":
    main()
