"""Pictures as samples."""
