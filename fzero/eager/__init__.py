"""Parameters that are there only while something reads them."""
