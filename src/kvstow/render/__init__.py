"""Layouts, routes and simulations made visible: in a terminal, as pages.

text           rows and slabs to scale, as lines of text
page           self-contained HTML: markup, style, script and numbers in one file
data           what pages draw from: layouts, routes, simulations
plan_page      the page of `kvstow plan`: one model, planned many times over
assets/        scripts and styles of the pages
"""
