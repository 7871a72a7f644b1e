package layer

// Range of a data file, in bytes.
type Range struct {
	Off int64
	Len int64
}
