// Package detect measures the detectors of audit/detect in real sandboxes: how many
// of the hacks of the corpus they find, and what they say of honest rollouts.
package detect
