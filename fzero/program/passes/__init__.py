"""Passes: functions from Program to Program."""
