"""What the runtime is worth: benchmarks against plain decoding and against other runtimes."""
