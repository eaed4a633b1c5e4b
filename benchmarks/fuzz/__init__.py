"""Random training programs, run by this package and by plain PyTorch: is any difference silent?

    python -m benchmarks.fuzz --count 2000 --seed 0
    torchrun --nproc-per-node 2 -m benchmarks.fuzz --count 2000 --seed 0

A program is plain data. `programs` draws and shrinks them, `pieces` builds the module,
`sources` are the places outside that it reads from, `changes` is what happens between steps,
`plain` is the reference and `ours` the same by a step function or the Engine.
"""
