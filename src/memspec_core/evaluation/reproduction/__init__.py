"""The paper's figures, made anew: on this machine, on our traces simulated, on generated traces.

`run.py` is where to begin: it measures (`real.py`) or simulates (`measured.py`), computes every
figure (`figures.py`) beside the paper's claims (`claims.py`), draws (`plots.py`) and reports
(`report.py`).
"""
