//! Tests of charts compare the structure of drawings (number of shapes, texts, order along an axis)
//! and never compare the bytes.

use super::*;
use regex::Regex;

fn example_curves_chart(kind: AxisScaleKind) -> TitledChart {
    let series = |name: &str, colour: usize, scale: f64| CurveOrPointSeries {
        legend_name: name.to_owned(),
        colour_number: colour,
        joined_by_lines: true,
        marks: [1.0, 2.0, 4.0, 8.0]
            .map(|s| PointWithRange {
                x: 512.0 * s,
                y: 1e5 * s * scale,
                y_range: (9e4 * s * scale, 2e5 * s * scale),
            })
            .to_vec(),
    };
    let ticks = [512.0, 1024.0, 2048.0, 4096.0];
    TitledChart {
        chart_title: "attention/forward over s".to_owned(),
        chart_subtitle: "d128 causal bf16, hot".to_owned(),
        body: ChartBody::Xy(XyChart {
            horizontal_axis: ChartAxis::with_round_ticks(
                "s",
                PlottedUnit::Count,
                AxisScaleKind::Logarithmic,
            )
            .with_ticks_at(ticks),
            vertical_axis: ChartAxis::with_round_ticks(
                "time of a launch",
                PlottedUnit::TimeNs,
                kind,
            ),
            series: vec![series("cuda/flash", 0, 1.0), series("cuda/<naive> & \"co\"", 1, 30.0)],
            reference_lines: vec![ReferenceLine {
                legend_name: "limit".to_owned(),
                line_corners: vec![(512.0, 5e4), (4096.0, 4e5)],
            }],
            fills_page_width: false,
        }),
    }
}

fn example_rows_chart() -> TitledChart {
    let row = |i: usize| ChartRowWithLabel {
        row_label: format!("family/operation/{}", "long_".repeat(40 * (i % 2)) + &i.to_string()),
        value_text: "+1.0%".to_owned(),
        marks: vec![
            MarkInChartRow::IntervalWithCentreDot(0.9, 1.0 + i as f64 / 10.0, 1.5, 0),
            MarkInChartRow::VerticalTickAtValue(1.0),
            MarkInChartRow::RingsAtValues(vec![1.0, 1.1], 1),
        ],
    };
    TitledChart {
        chart_title: "Change".to_owned(),
        chart_subtitle: String::new(),
        body: ChartBody::Rows(LabelledRowsChart {
            horizontal_axis: ChartAxis::with_round_ticks(
                "change of the time",
                PlottedUnit::RatioAsRelativeChange,
                AxisScaleKind::Linear,
            ),
            mark_colour_legend: vec!["interval".to_owned(), "runs".to_owned()],
            rows: (0..5).map(row).collect(),
            vertical_line_value: Some(1.0),
        }),
    }
}

fn example_heat_map_chart() -> TitledChart {
    TitledChart {
        chart_title: "st_bif/forward".to_owned(),
        chart_subtitle: "time".to_owned(),
        body: ChartBody::Heat(HeatMapData {
            column_titles: vec!["4".to_owned(), "8".to_owned()],
            row_labels: vec!["b8".to_owned(), "b16".to_owned()],
            cell_values: vec![vec![Some(1e3), Some(2e3)], vec![None, Some(8e3)]],
            quantity: PlottedUnit::TimeNs,
            x_and_y_axis_names: ("t".to_owned(), "b".to_owned()),
        }),
    }
}

fn count_svg_tags(svg: &str, tag: &str) -> usize {
    svg.matches(&format!("<{tag} ")).count()
}

fn texts_of_svg(svg: &str) -> Vec<String> {
    let text = Regex::new("<text[^>]*>([^<]*)</text>").unwrap();
    text.captures_iter(svg).map(|found| found[1].to_owned()).collect()
}

/// Values of an attribute of all SVG shapes that have this tag and this colour.
fn svg_attribute_of_coloured_shapes(
    svg: &str,
    tag: &str,
    attribute: &str,
    colour: colour::ChartColour,
) -> Vec<f64> {
    let colour = colour::rgb_as_hex(colour.light_theme_rgb());
    let shape = Regex::new(&format!("<{tag} [^>]*{colour}[^>]*>")).unwrap();
    let number = Regex::new(&format!(r#" {attribute}="(-?[\d.]+)""#)).unwrap();
    shape
        .find_iter(svg)
        .map(|shape| number.captures(shape.as_str()).unwrap()[1].parse().unwrap())
        .collect()
}

#[test]
fn a_curve_has_a_mark_for_every_value_in_order() {
    for kind in [AxisScaleKind::Logarithmic, AxisScaleKind::LinearFromZero] {
        let svg = example_curves_chart(kind).render_svg().unwrap();
        assert_eq!(count_svg_tags(&svg, "circle"), 8);
        for series in [0, 1] {
            let coordinates = |attribute| {
                svg_attribute_of_coloured_shapes(
                    &svg,
                    "circle",
                    attribute,
                    colour::ChartColour::SeriesByNumber(series),
                )
            };
            assert_eq!(coordinates("cx").len(), 4);
            assert!(coordinates("cx").is_sorted_by(|a, b| a < b), "to the right");
            assert!(coordinates("cy").is_sorted_by(|a, b| a > b), "upwards");
        }
        // The slower implementation lies higher in the chart, and each doubling of x is the same
        // distance on a logarithmic axis.
        let cy = |series| {
            svg_attribute_of_coloured_shapes(
                &svg,
                "circle",
                "cy",
                colour::ChartColour::SeriesByNumber(series),
            )
        };
        assert!(cy(0).iter().zip(cy(1)).all(|(fast, slow)| slow < *fast));
        let cx = svg_attribute_of_coloured_shapes(
            &svg,
            "circle",
            "cx",
            colour::ChartColour::SeriesByNumber(0),
        );
        assert!((cx[1] - cx[0] - (cx[3] - cx[2])).abs() <= 1.0, "{cx:?}");
        let texts = texts_of_svg(&svg);
        let expected =
            ["attention/forward over s", "512", "4096", "limit", "cuda/flash", "time of a launch"];
        expected
            .iter()
            .for_each(|text| assert!(texts.iter().any(|it| it == text), "{text}: {texts:?}"));
        assert!(texts.iter().any(|text| text.ends_with(" ms")), "{texts:?}");
    }
}

#[test]
fn foreign_text_in_a_drawing_is_escaped() {
    let svg = example_curves_chart(AxisScaleKind::Logarithmic).render_svg().unwrap();
    assert!(svg.contains("cuda/&lt;naive&gt; &amp; &quot;co&quot;") && !svg.contains("<naive>"));
    let mut chart = example_heat_map_chart();
    chart.chart_title = "a\u{1b}[31m\u{0}b".to_owned();
    let svg = chart.render_svg().unwrap();
    assert!(!svg.contains(['\u{1b}', '\u{0}']), "{svg}");
}

#[test]
fn chart_rows_have_labels_and_stay_inside_the_picture() {
    let chart = example_rows_chart();
    let svg = chart.render_svg().unwrap();
    // Each of the five rows has three circles: one for the middle of its interval, and two for
    // single runs.
    assert_eq!(count_svg_tags(&svg, "circle"), 15);
    let at = svg_attribute_of_coloured_shapes(
        &svg,
        "circle",
        "cx",
        colour::ChartColour::SeriesByNumber(0),
    );
    assert!(at.is_sorted_by(|a, b| a < b), "{at:?}");
    assert!(
        texts_of_svg(&svg).iter().any(|text| text.contains('…')),
        "longer than the drawing is wide"
    );
    assert_texts_lie_inside_picture(&chart.layout_as_vector_picture());
}

fn assert_texts_lie_inside_picture(picture: &PictureOfShapes) {
    for shape in &picture.shapes {
        let PictureShape::SingleLineText {
            anchor_x_pixels: x,
            text,
            font_size_pixels: size,
            anchor,
            ..
        } = shape
        else {
            continue;
        };
        let width = font::text_width_with_margin(text, *size);
        let left = match anchor {
            HorizontalTextAnchor::TextStart => *x,
            HorizontalTextAnchor::TextMiddle => x - width / 2.0,
            HorizontalTextAnchor::TextEnd => x - width,
        };
        assert!(left >= 0.0 && left + width <= picture.width_pixels, "{text} at {left}");
    }
}

#[test]
fn long_row_labels_are_wrapped_and_leave_room_for_the_marks() {
    let labels = [
        "s200_d64_causal_bf16_outliers_tokens1600 cuda/flash_wgmma_deterministic cold",
        "b4_h12_s4096_d128_causal_bf16_outliers_tokens1600_pages64_e4m3 cuda/flash cold",
        "s512 cuda/flash hot",
    ];
    let mut chart = example_rows_chart();
    let ChartBody::Rows(body) = &mut chart.body else { unreachable!() };
    body.rows.truncate(labels.len());
    for (row, label) in body.rows.iter_mut().zip(labels) {
        row.row_label = label.to_owned();
        row.value_text = "12.34 ms hot, 123.4 ms cold".to_owned();
    }
    let svg = chart.render_svg().unwrap();
    let shown = texts_of_svg(&svg).concat().replace(' ', "");
    for label in labels {
        assert!(shown.contains(&label.replace(' ', "")), "{label}: {shown}");
    }
    let at = |attribute| {
        svg_attribute_of_coloured_shapes(
            &svg,
            "circle",
            attribute,
            colour::ChartColour::SeriesByNumber(0),
        )
    };
    assert!(at("cx")[2] - at("cx")[0] > 50.0, "{:?}", at("cx"));
    // A row whose label has one line has the usual height.
    let steps: Vec<f64> = at("cy").windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(steps[0] > steps[1] && steps[1] > 20.0, "{steps:?}");
    assert_texts_lie_inside_picture(&chart.layout_as_vector_picture());
}

#[test]
fn long_chart_titles_and_column_names_are_wrapped() {
    let mut chart = example_heat_map_chart();
    chart.chart_subtitle =
        "share of the limit, fastest implementation; h56 w56 conv1 f32 int8, cold".to_owned();
    let ChartBody::Heat(body) = &mut chart.body else { unreachable!() };
    body.column_titles =
        ["heads12 tokens512 level8", "heads12 tokens1600 level16"].map(str::to_owned).into();
    let texts = texts_of_svg(&chart.render_svg().unwrap());
    assert!(!texts.iter().any(|text| text.contains('…')), "{texts:?}");
    let shown = texts.join(" ");
    for part in chart.chart_subtitle.split(' ').chain(["tokens1600", "level16"]) {
        assert!(shown.contains(part), "{part}: {texts:?}");
    }
    assert_texts_lie_inside_picture(&chart.layout_as_vector_picture());
}

#[test]
fn a_heat_map_cell_has_the_colour_of_its_value() {
    let svg = example_heat_map_chart().render_svg().unwrap();
    let cells_of_step = |step| {
        svg_attribute_of_coloured_shapes(&svg, "rect", "x", colour::ChartColour::HeatMapStep(step))
            .len()
    };
    assert_eq!((cells_of_step(0), cells_of_step(colour::NUMBER_OF_HEAT_MAP_COLOURS - 1)), (1, 1));
    let texts = texts_of_svg(&svg);
    ["1 µs", "8 µs", "b16", "right: t; down: b", "-"]
        .iter()
        .for_each(|text| assert!(texts.iter().any(|it| it == text), "{text}: {texts:?}"));
}

#[test]
fn a_png_has_the_size_colours_and_title_of_its_layout() {
    let chart = example_curves_chart(AxisScaleKind::Logarithmic);
    let image = png::Decoder::new(std::io::Cursor::new(chart.render_png().unwrap()));
    let mut reader = image.read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut pixels).unwrap();
    let picture = chart.layout_as_vector_picture();
    assert_eq!(
        (info.width, info.height),
        ((2.0 * picture.width_pixels) as u32, (2.0 * picture.height_pixels).ceil() as u32)
    );
    let has = |colour: colour::ChartColour| {
        pixels.chunks_exact(3).filter(|pixel| *pixel == colour.light_theme_rgb()).count()
    };
    assert!(
        has(colour::ChartColour::SeriesByNumber(0)) > 200
            && has(colour::ChartColour::SeriesByNumber(1)) > 200
    );
    // The first 48 pixel rows of the PNG contain the letters of the chart's title.
    let row = 3 * info.width as usize;
    let title = &pixels[..row * 48];
    let ink = title.chunks_exact(3).filter(|pixel| pixel[0] < 0x80).count();
    assert!(ink > 300, "{ink} dark pixels where the title is");
}

#[test]
fn drawing_an_empty_chart_does_not_panic() {
    let empty = ChartAxis::with_round_ticks("x", PlottedUnit::TimeNs, AxisScaleKind::Logarithmic);
    let bodies = [
        ChartBody::Xy(XyChart {
            horizontal_axis: empty.clone(),
            vertical_axis: empty.clone(),
            series: vec![],
            reference_lines: vec![],
            fills_page_width: false,
        }),
        ChartBody::Rows(LabelledRowsChart {
            horizontal_axis: empty,
            mark_colour_legend: vec![],
            rows: vec![],
            vertical_line_value: None,
        }),
        ChartBody::Heat(HeatMapData {
            column_titles: vec![],
            row_labels: vec![],
            cell_values: vec![],
            quantity: PlottedUnit::TimeNs,
            x_and_y_axis_names: (String::new(), String::new()),
        }),
    ];
    for body in bodies {
        let chart = TitledChart { chart_title: String::new(), chart_subtitle: String::new(), body };
        assert!(chart.render_svg().unwrap().ends_with("</svg>"));
    }
}
