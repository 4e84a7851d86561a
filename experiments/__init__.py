"""From a sweep file to a table that can be trusted: search, train, measure, track."""
