"""Show that an edit or a model is right: sites, whole models, ranges."""
