"""Networks of a size for a GPU. A package, since .ci/ has a module of the same name."""
