"""The arguments that prove bounds, a file each; :mod:`zbsolve.bounds.catalogue` lists them."""
