"""How Sphinx renders the pages: `python -m sphinx -W -b html pytest_edgeq/docs OUT`."""

from importlib.metadata import version as version_of

project = "pytest-edgeq"
author = "the authors of pytest-edgeq"
version = release = version_of("pytest-edgeq")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"pytest-edgeq {release}"

# Links to headings, four levels deep, spelt as on GitHub.
myst_heading_anchors = 4

# Docstrings mark code by single backticks, as Markdown does.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 80
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
