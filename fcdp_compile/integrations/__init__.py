"""fcdp inside other libraries' training loops, one module for each.

A module of this package first requires the libraries that it needs, so that an error names what to install.
"""
