package wire

import (
	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/api/dsec/v1"
)

// Verbs of screens, see Verbs.
const (
	VerbScreenshot = "screen_shot"
	VerbAct        = "screen_act"
	VerbConsole    = "machine_console"
	VerbPower      = "machine_power"
	VerbMark       = "mark"
	VerbRevert     = "revert"
	VerbMarks      = "marks"
)

// Region translates a part of a screen; all of it is absent.
func Region(r dsec.Region) *dsecv1.Region {
	if r == (dsec.Region{}) {
		return nil
	}
	return &dsecv1.Region{X: int32(r.X), Y: int32(r.Y), Width: int32(r.Width), Height: int32(r.Height)}
}

// RegionFrom is the other way.
func RegionFrom(p *dsecv1.Region) dsec.Region {
	return dsec.Region{X: int(p.GetX()), Y: int(p.GetY()), Width: int(p.GetWidth()), Height: int(p.GetHeight())}
}

// Picture of a screen.
func Picture(p dsec.Picture) *dsecv1.ScreenshotResponse {
	return &dsecv1.ScreenshotResponse{Png: p.PNG, Region: Region(p.Region), Width: int32(p.Width), Height: int32(p.Height)}
}

// PictureFrom is the other way.
func PictureFrom(p *dsecv1.ScreenshotResponse) dsec.Picture {
	return dsec.Picture{PNG: p.GetPng(), Region: RegionFrom(p.GetRegion()), Width: int(p.GetWidth()), Height: int(p.GetHeight())}
}

// Actions at a screen.
func Actions(all []dsec.ScreenAction) (out []*dsecv1.ScreenAction) {
	for _, a := range all {
		out = append(out, &dsecv1.ScreenAction{Kind: string(a.Kind), X: int32(a.X), Y: int32(a.Y), ToX: int32(a.ToX), ToY: int32(a.ToY), Dx: int32(a.DX), Dy: int32(a.DY),
			Button: a.Button, Count: int32(a.Count), Keys: a.Keys, Text: a.Text, Compose: a.Compose})
	}
	return out
}

// ActionsFrom is the other way.
func ActionsFrom(all []*dsecv1.ScreenAction) (out []dsec.ScreenAction) {
	for _, p := range all {
		out = append(out, dsec.ScreenAction{Kind: dsec.ScreenKind(p.GetKind()), X: int(p.GetX()), Y: int(p.GetY()), ToX: int(p.GetToX()), ToY: int(p.GetToY()), DX: int(p.GetDx()), DY: int(p.GetDy()),
			Button: p.GetButton(), Count: int(p.GetCount()), Keys: p.GetKeys(), Text: p.GetText(), Compose: p.GetCompose()})
	}
	return out
}
