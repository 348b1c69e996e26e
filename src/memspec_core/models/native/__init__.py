"""The optional step in C++: one loop over a decoder's layers, on CPUs with AVX-512."""
