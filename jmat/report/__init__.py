"""Results of a study: rows, their notes, tables and plots. Nothing here touches a
model.
"""
