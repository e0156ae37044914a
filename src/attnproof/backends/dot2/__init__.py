"""Backend for AMD GPUs without matrix cores (gfx906 first): HIP C++ compiled at run time, no SDK needed.

Files, from the inside out: ``kernels`` (device code), ``source`` (its text), ``arguments`` (the struct it gets).
"""
