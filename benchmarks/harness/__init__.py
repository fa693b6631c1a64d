"""Parts that every benchmark uses: settings, times, tables, figures and result files."""
