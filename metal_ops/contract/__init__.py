"""The contract of the hand-written kernels: what each must do on every device, and planted faults
that prove that the checks see.

    python -m metal_ops.contract                     every kernel; Metal, or Metal emulated on Linux
    python -m metal_ops.contract --only rms_norm     one
    lfm2 verify                                      the same, for whoever has the program only

Gates, each over every case of a kernel:

    builds     compiles, and its arguments and their types are those of the contract
    shapes     every shape gives the right result, and touches nothing else: memory around the
               buffers holds a pattern, what is written is NaN before, state keeps what it held
    rows       a row's bits do not depend on width, order, neighbours, streams, slot or padding
    reference  within the stated bound of a float64 oracle, or the bits of what it stands in for
    limits     every launch is within the limits of each family of Apple's chips

A control is a small edit of a kernel's text that must turn the gate it names red. `case.py` says
what a case is, the other modules hold the kernels' cases, `gates.py` runs them.
"""
