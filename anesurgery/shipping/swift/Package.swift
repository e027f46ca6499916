// swift-tools-version:5.9
import PackageDescription

let package = Package(
    name: "Runner",
    platforms: [.macOS("15.0"), .iOS("18.0")],
    products: [.library(name: "Runner", targets: ["Runner"])],
    targets: [
        .target(name: "Runner"),
        .testTarget(name: "RunnerTests", dependencies: ["Runner"], resources: [.copy("fixture.json")]),
    ]
)
