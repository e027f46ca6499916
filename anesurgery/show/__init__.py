"""Everything that draws: terminal tables, HTML pages, notebook cells, plain data."""
