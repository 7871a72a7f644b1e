// Package version says which dsec this is.
package version

// Version of every part that is built from this tree.
const Version = "0.1.0"
