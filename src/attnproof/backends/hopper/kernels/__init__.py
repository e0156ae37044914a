"""Gluon kernels: ``pieces`` are shared, ``forward`` and ``backward`` are made of them."""
